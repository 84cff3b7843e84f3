"""The OpenAI-compatible HTTP server: applications speak to the engine through it."""
