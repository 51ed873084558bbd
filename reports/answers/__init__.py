"""What each answer shows, as blocks: written once, drawn in every format."""
