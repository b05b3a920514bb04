"""Short names for --model, and what each stands for."""

from __future__ import annotations

import difflib

SHIPPED = {"tiny-relullama": "tiny-relullama", "tiny-moe": "tiny-moe"}  # alias -> folder below dynajax/assets
FETCHED = ("smollm2-135m",)  # made by scripts/fetch_model.py in the cache folder
HUB = {  # alias -> repository on the Hugging Face hub
    "relullama-7b": "SparseLLM/ReluLLaMA-7B",
    "relullama-13b": "SparseLLM/ReluLLaMA-13B",
    "relullama-70b": "SparseLLM/ReluLLaMA-70B",
    "prosparse-7b": "SparseLLM/prosparse-llama-2-7b",
    "prosparse-13b": "SparseLLM/prosparse-llama-2-13b",
    "minicpm-s-1b": "openbmb/MiniCPM-S-1B-sft",
    "bamboo-7b": "PowerInfer/Bamboo-base-v0_1",
    "turbosparse-mistral": "PowerInfer/TurboSparse-Mistral-Instruct",
    "relufalcon-40b": "SparseLLM/ReluFalcon-40B",
    "sparselm-2b": "SakanaAI/SparseLM2B",
    "opt-125m": "facebook/opt-125m",
    "opt-1.3b": "facebook/opt-1.3b",
    "opt-6.7b": "facebook/opt-6.7b",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen1.5-moe-a2.7b": "Qwen/Qwen1.5-MoE-A2.7B",
    "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0125",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "granite-1b-a400m": "ibm-granite/granite-3.1-1b-a400m-base",
    "switch-base-8": "google/switch-base-8",
}
PREDICTOR_REPOS = {  # alias -> repository of model_<layer>.pt pickles, trained for that model
    "relullama-7b": "PowerInfer/ReluLLaMA-7B-Predictor",
    "relullama-13b": "PowerInfer/ReluLLaMA-13B-Predictor",
    "relullama-70b": "PowerInfer/ReluLLaMA-70B-Predictor",
    "prosparse-7b": "PowerInfer/prosparse-llama-2-7b-predictor",
    "prosparse-13b": "PowerInfer/prosparse-llama-2-13b-predictor",
    "bamboo-7b": "PowerInfer/Bamboo-base-v0.1-predictor",
    "relufalcon-40b": "PowerInfer/ReluFalcon-40B-Predictor",
}


def runnable() -> tuple[str, ...]:
    """Every alias that this version runs."""
    return (*SHIPPED, *FETCHED, *HUB)


def predictor_repo(name: str) -> str | None:
    """The repository of the predictors published for an alias or its repository, at any revision; None: there is none.

    Example: relullama-7b and SparseLLM/ReluLLaMA-7B@main both give PowerInfer/ReluLLaMA-7B-Predictor.
    """
    model = name.partition("@")[0]
    alias = next((alias for alias, repo in HUB.items() if repo.lower() == model.lower()), model)
    return PREDICTOR_REPOS.get(alias)


def did_you_mean(name: str) -> str:
    """ "; did you mean A, B?" with the nearest aliases, or nothing. A repository's name leads to its alias too."""
    wanted = name[:100].lower()
    spelt = {alias: alias for alias in runnable()} | {repo.lower(): alias for alias, repo in HUB.items()}
    near = dict.fromkeys(spelt[word] for word in difflib.get_close_matches(wanted, spelt, n=3, cutoff=0.6))
    return f"; did you mean {', '.join(near)}?" if near else ""
