"""Language models as jobs: text becomes packed tokens on disk, tokens a trained model, and a model figures and text."""
