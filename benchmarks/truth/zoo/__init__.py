"""Public training programs, fetched and run at a small size, that attribution is scored on."""
