"""Helpers that all packages share: errors, command line, schemas, machine limits, atomic writes."""
