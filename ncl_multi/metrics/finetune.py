"""Accuracy of the encoder after fine-tuning with labels."""

from collections.abc import Callable
from copy import deepcopy

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

Inputs = Shaped[Tensor, "n ..."]
Encode = Callable[[nn.Module, Tensor], Float[Tensor, "n width"]]


def fine_tuned_predictions(
    model: nn.Module,
    encode: Encode,
    train: tuple[Inputs, Int[Tensor, " n"]],
    test: tuple[Shaped[Tensor, "m ..."], Int[Tensor, " m"]],
    *,
    augment: Callable[[Tensor], Tensor] = lambda x: x,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    epochs: int = 10,
    batch_size: int = 128,
    lr: float = 1e-3,
    bf16: bool = False,
    seed: int = 0,
) -> Int[Tensor, " m"]:
    """Classes of test rows after a copy of the model, with a linear classifier, learnt the labels.

    `encode(model, x)` returns the output to classify: the encoder's or the head's. `augment` makes
    inputs of training rows, `prepare` of test rows. AdamW, cosine schedule, no choice is made on
    test rows. With `bf16` the model multiplies in bf16 while it is trained.

    Example:
        >>> x, y = torch.eye(4).repeat(20, 1), torch.arange(4).repeat(20)
        >>> encode = lambda model, x: model(x)
        >>> predicted = fine_tuned_predictions(nn.Linear(4, 8), encode, (x, y), (x, y), lr=0.1)
        >>> torch.equal(predicted, y)
        True
    """
    from tqdm.auto import tqdm

    (train_x, train_y), (test_x, test_y) = train, test
    for x, y, name in ((train_x, train_y, "train"), (test_x, test_y, "test")):
        if len(x) != len(y) or not len(x):
            raise ValueError(f"{name} needs one label per input; got {len(x)} and {len(y)}")
    classes = train_y.unique()
    if not torch.isin(test_y, classes).all():
        raise ValueError("the test rows contain classes that the train rows do not")
    labels = torch.searchsorted(classes, train_y)
    model, generator = deepcopy(model), torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    with torch.no_grad():
        width = encode(model.eval(), prepare(test_x[:2].to(device))).shape[1]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        classifier = nn.Linear(width, len(classes)).to(device)
        weights = [*model.parameters(), *classifier.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=1e-4)
        batch_size = min(batch_size, len(train_x))
        steps = epochs * (len(train_x) // batch_size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        model.train()
        with tqdm(total=steps, desc="fine-tune", unit="step", leave=False, disable=None) as bar:
            for _ in range(epochs):
                order = torch.randperm(len(train_x), generator=generator)
                for rows in order[: len(order) // batch_size * batch_size].split(batch_size):
                    x = augment(train_x[rows].to(device))
                    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                        logits = classifier(encode(model, x))
                    loss = F.cross_entropy(logits.float(), labels[rows].to(device))
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    bar.update()
    model.eval()
    with torch.no_grad():
        guesses = [
            classifier(encode(model, prepare(test_x[rows].to(device)))).argmax(1).cpu()
            for rows in torch.arange(len(test_x)).split(512)
        ]
    return classes.cpu()[torch.cat(guesses)]
