"""The forecaster as MLflow loads it: this file is copied beside the weights and executed (models from code), never
imported.

Context in, forecast out: a long frame (`unique_id, ds, y`, where `y` may be empty) is read by a fresh memory from its
first row to its last, and the forecast continues each series, `h` rows of it. `ds` is ISO 8601 text or, where the model
was trained on whole numbers, a number. No call leaves anything behind; a memory that lives on
is the streaming service's.
"""

import mlflow
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext


class RegisteredForecaster(PythonModel):
    def load_context(self, context: PythonModelContext) -> None:
        from pipelines.forecasting.job import load_forecaster

        self.forecaster = load_forecaster(context.artifacts["weights"], context.artifacts["config"])

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict | None = None
    ) -> pd.DataFrame:
        import polars as pl

        from connectors.errors import UserError
        from pipelines.forecasting.job import forecast_frame

        params = params or {}
        frame = pl.from_pandas(model_input, nan_to_null=True)
        try:
            if frame.schema["ds"] == pl.String:
                frame = frame.with_columns(pl.col("ds").str.to_datetime(time_zone="UTC").dt.replace_time_zone(None))
            forecast = forecast_frame(self.forecaster, frame, horizon=params.get("h"), quantiles=params.get("quantiles"))
            unseen = forecast.filter(pl.col("mean").is_nan())["unique_id"].to_list()
            if unseen:  # NaN is no JSON
                raise UserError(f"series {unseen[0]!r} has no observed value: there is nothing to forecast from")
        except (UserError, pl.exceptions.PolarsError) as error:
            # The scoring server answers 400 with this line; anything else it calls unexpected, with a traceback.
            raise MlflowException.invalid_parameter_value(str(error).splitlines()[0]) from None
        return forecast.to_pandas()


mlflow.models.set_model(RegisteredForecaster())
