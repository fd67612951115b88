"""Our checkpoint folders, and how other people's files become one or are written from one."""
