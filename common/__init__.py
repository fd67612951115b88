"""What every room may use and what knows of no other: errors, files, pictures, the frame of a command line.
"""
