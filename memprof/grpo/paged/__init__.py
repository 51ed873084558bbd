"""Generate in a rolling batch over a pool of bounded size: keys and values of waiting sequences are computed again."""
