"""Download, verify and convert the demo's model."""
