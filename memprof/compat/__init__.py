"""Every foreign private name that memprof touches, checked before it is used."""
