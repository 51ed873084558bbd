"""Hold what memprof knows of a run before it runs: its settings, its model's shape, the card. No torch here.

``settings`` are one run, of five ``parts``; ``from_trainer`` and ``from_recording`` read them, ``to_trl_config`` writes
them as TRL's and PEFT's configs. ``model_shape`` reads a model's config, ``optimizers`` is the table of optimizers (a
new one is a row there), ``catalogue`` and ``gpus`` know models and cards by name, ``expected_error`` says how far
predictions were off.
"""
