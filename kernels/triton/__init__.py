"""GPU twins of the chunk forms, with the same signatures; imported only when a GPU or the interpreter is asked for."""
