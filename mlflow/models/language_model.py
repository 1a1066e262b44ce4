"""The language model as MLflow loads it: this file is copied beside the weights and executed (models from code), never
imported.

Prompts in (`prompt`: text), one row each out: `text`, `tokens` (how many) and `reason` (`end`, `stop` or `limit`). Parameters: `max_tokens`
and those of sampling; row i draws with `seed` + i, so the same request has the same answer. A row that is no prompt, and a
parameter out of bounds, make the request a bad one (status 400). No call leaves anything behind.
"""

import mlflow
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext


class RegisteredLanguageModel(PythonModel):
    def load_context(self, context: PythonModelContext) -> None:
        from titans_core.language_model import load

        self.model, self.tokenizer = load(context.artifacts["weights"])

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict | None = None
    ) -> pd.DataFrame:
        from connectors.errors import UserError
        from pipelines.language.completion import checked, complete, rows, wanted

        try:
            found = complete(self.model, self.tokenizer, checked(model_input["prompt"].tolist()), wanted(params or {}))
        except UserError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None
        return pd.DataFrame(list(rows(found)))


mlflow.models.set_model(RegisteredLanguageModel())
