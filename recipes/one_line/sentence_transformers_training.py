"""sentence-transformers: a stock model with a ReLU, trained by its own trainer with our loss.

`Dense` with `nn.ReLU` is a stock module, so the model loads anywhere without this package.
"""

import tempfile

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import Dense
from sentence_transformers.sentence_transformer.training_args import (
    SentenceTransformerTrainingArguments,
)
from torch import nn

from ncl_multi import data
from ncl_multi.adapters.sentence.objective import NonNegLoss

model = SentenceTransformer(str(data.minilm()), device="cpu")
model.append(Dense(384, 1024, activation_function=nn.ReLU()))  # <- the line

pairs = Dataset.from_dict(
    {
        "anchor": ["a cat sleeps", "rain in the city", "she plays chess", "the bread is fresh"],
        "positive": ["a cat is asleep", "it rains in town", "a chess player", "bread just baked"],
    }
)
with tempfile.TemporaryDirectory() as folder:
    SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=4,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=pairs,
        loss=NonNegLoss(model),
    ).train()
z = model.encode(["a kitten naps"])
print(f"active {(z > 0).mean():.1%}")
