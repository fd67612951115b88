"""Helpers of every package: errors, files, the frame of a command line."""
import time

STARTED = time.perf_counter()  # commands import this package first, before anything slow
VERSION = "0.1"
