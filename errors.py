"""The one error a user sees. Apart from everything else, so that a command line can catch it before torch is imported."""


class CheckpointError(Exception):
    """A checkpoint cannot be read, converted or used. The message is one line: what, where, what to do."""
