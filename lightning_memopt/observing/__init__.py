"""One real training step seen: its regions, and what each costs under every treatment."""
