"""Run TRL's own tests of its trainers with memprof's callback added and with the lean trainers in their place."""
