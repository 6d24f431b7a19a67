"""What transformers says: the oracle of the end-to-end tests."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "Name three colours.",
    "Write a Python function that adds two numbers.",
    "Tell me a short story about a lighthouse keeper.",
    "What is the capital of France?",
    "Give me two tips for sleeping well.",
    "Explain what a queue is to a child.",
    "Write one sentence about autumn rain.",
    "List the days of the week.",
    "How do I boil an egg?",
    "What does the word 'gravity' mean?",
    "Write a polite letter that declines an invitation.",
    "Describe a cat in ten words.",
    "What should I pack for a walk in the mountains?",
    "Write a loop in C that prints the numbers from 1 to 10.",
    "Why is the sky blue?",
    "Suggest a name for a bakery.",
    "How many legs does a spider have, and how many an ant?",
    "Translate 'good morning' into Spanish.",
    "Write a haiku about the sea.",
    "What is the difference between a lake and a river?",
]


@dataclass(frozen=True, slots=True)
class Reference:
    """One greedy chat answer: prompt ids after the template, answer ids, the answer's text."""

    prompt: str
    prompt_ids: list[int]
    answer_ids: list[int]
    text: str

    @property
    def sequence(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_ids + self.answer_ids


def greedy_answers(folder: Path, prompts: list[str], max_tokens: int, num_threads: int = 2) -> list[Reference]:
    """generate(do_sample=False) in fp32, one prompt at a time. The text is without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    references = []
    try:
        for prompt in prompts:
            chat = [{"role": "user", "content": prompt}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            out = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)[0]
            start = inputs["input_ids"].shape[1]
            ids = out[start:].tolist()
            text = tokenizer.decode(ids, skip_special_tokens=True)
            references.append(Reference(prompt, out[:start].tolist(), ids, text))
    finally:
        torch.set_num_threads(threads)
    return references
