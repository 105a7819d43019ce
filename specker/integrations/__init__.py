"""specker inside other engines."""
