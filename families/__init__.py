"""Targets and features beyond dense LLaMA and Qwen: a file each, named in `extensions`."""
