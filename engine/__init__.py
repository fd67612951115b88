"""Decoding: engine, scheduler, model runner, steps, sampling, options."""
