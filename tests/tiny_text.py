"""A tiny BERT, its tokenizer, and sentences that they read."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["a", "the", "cat", "dog", "sat", "ran", "on", "mat", "slow", "red", "blue"]
SENTENCES = ["the cat sat on the mat", "a dog ran", "the red dog", "slow cat", "a", "blue"]


def tiny_tokenizer():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: number for number, word in enumerate([*special, *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=32, **names)


def tiny_bert(width=32):
    torch.manual_seed(0)
    return transformers.BertModel(
        transformers.BertConfig(
            vocab_size=32, hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=32,
        )
    ).eval()  # fmt: skip


def tiny_text_settings():
    return {
        "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 32,
    }  # fmt: skip


def tiny_vision_settings():
    return {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
