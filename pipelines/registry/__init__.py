"""From the registry to production: model cards, the gate between challenger and champion, the way back."""
