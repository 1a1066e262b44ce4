"""The sequence classifier as MLflow loads it: this file is copied beside the weights and executed (models from code), never
imported.

Sequences in (`sequence`: bases as text, in either case), one row each out: `length`, `prediction` and `prob_CLASS` for every
class, in the model's order. Sequences shorter than the model's length are padded with N, longer ones cut about their middle.
A row that is no sequence makes the request a bad one (status 400, the row is named). No call leaves anything behind.
"""

import mlflow
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext


class RegisteredClassifier(PythonModel):
    def load_context(self, context: PythonModelContext) -> None:
        from titans_core.classifier import load

        self.model, self.card = load(context.artifacts["weights"])

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict | None = None
    ) -> pd.DataFrame:
        from connectors.errors import UserError
        from pipelines.genomics.answers import answer, checked

        try:
            sequences = checked(model_input["sequence"].tolist())
        except UserError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None
        return answer(self.model, sequences).to_pandas()


mlflow.models.set_model(RegisteredClassifier())
