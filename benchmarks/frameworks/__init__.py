"""Are the names that memprof has of other frameworks those of their newest releases?"""
