"""Where samples come from, and in which order. Only the loader needs torch."""
