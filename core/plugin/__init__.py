"""Plugins: where they are found (`discovery`), judged (`judge`), loaded by the one policy (`manager`), what they
register with (`registry`), and the hook they implement (`hookspecs`)."""
