"""Networks of draft heads beyond EAGLE."""
