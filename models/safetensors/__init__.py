"""Hugging Face folders: config.json, safetensors files, tokenizer.json."""
