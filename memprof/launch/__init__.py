"""``memprof run``: somebody's script as it is, with the callback on its trainer or a recording around its loop."""
