"""Model the CUDA caching allocator: its rules (:mod:`.model`) and its settings (:mod:`.settings`)."""
