"""Train, backtest and run forecasts of many series."""
