"""The jobs: a folder for each use of the models, and the one command that runs them."""

DEFAULT_TRACKING_URI = "sqlite:///runs/tethys.db"
"""Where runs and models are kept unless told otherwise: one SQLite file below the working folder, no server."""
DEFAULT_ALIAS = "challenger"
"""The alias that a newly trained version gets."""
DEFAULT_VERSION = "champion"
"""Which version of a model jobs use unless told otherwise: the one that passed the gate."""
