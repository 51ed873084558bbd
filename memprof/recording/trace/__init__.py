"""Record on a CPU, tensor by tensor: a dispatch mode that sees every storage's birth and death."""
