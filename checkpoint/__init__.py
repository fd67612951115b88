"""Our checkpoint folders: reading them, writing them, and converting from and to other projects' layouts."""
