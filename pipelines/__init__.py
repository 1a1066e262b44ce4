"""The jobs: a folder for each use of the models, and the one command that runs them."""
