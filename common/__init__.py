"""Helpers that all packages share: errors, command line, schemas, machine limits, atomic writes."""
import time

STARTED = time.perf_counter()  # commands import this package first, before anything slow
VERSION = "0.1"
