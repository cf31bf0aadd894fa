"""Dynamic cases: they change the model's work while it trains."""
