"""Helpers of every room: errors, files, pictures, the frame of a command line."""
VERSION = "0.1"
