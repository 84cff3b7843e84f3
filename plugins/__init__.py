"""Built-in features, one module or folder each; none has a door that an outside plugin lacks."""
