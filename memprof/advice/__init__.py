"""Find what would lower a run's peak: changes to its settings, what each saves and costs. Simulating needs torch."""
