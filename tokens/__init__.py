"""Text to token ids and back, chat templates, files of prompts and conversations."""
