"""Serve a small language model with random weights: continuous batching, and windows on demand."""

import argparse
import signal
import time

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import instrument
from instrument.integrations.server import Server

VOCABULARY, WIDTH, SLOTS, LENGTH = 256, 64, 4, 48


class Model(nn.Module):
    """One block of GPT-2, with a cache of keys and values for each running request."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("cache", torch.zeros(2, SLOTS, LENGTH, WIDTH))

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places(places)
        query, *new = self.attention(hidden).chunk(3, -1)
        for cache, values in zip(self.cache, new, strict=True):
            cache[slots[:, None], places] = values
        seen = torch.arange(LENGTH) <= places[..., None]
        keys, values = self.cache[:, slots]
        hidden = hidden + self.projection(scaled_dot_product_attention(query, keys, values, seen))
        return self.head(hidden + self.mlp(hidden))[:, -1].argmax(-1)


class Engine:
    """Runs a waiting prompt if there is a free slot, or else generates one token for each request."""

    def __init__(self, model: Model) -> None:
        self.model, self.waiting, self.running, self.done = model, [], {}, 0

    @torch.inference_mode()
    def iterate(self) -> None:
        free = [slot for slot in range(SLOTS) if slot not in self.running]
        if self.waiting and free:
            tokens, slots = self.waiting.pop(0), free[:1]
            with instrument.annotate("prefill", payload=len(tokens)):
                new = self.model(torch.tensor([tokens]), torch.tensor(slots), torch.arange(len(tokens))[None])
            self.running[slots[0]] = tokens
        else:
            slots = sorted(self.running)
            batch = torch.tensor([[self.running[slot][-1]] for slot in slots])
            places = torch.tensor([[len(self.running[slot]) - 1] for slot in slots])
            with instrument.annotate("decode", payload=len(slots)):
                new = self.model(batch, torch.tensor(slots), places)
        for slot, token in zip(slots, new.tolist(), strict=True):
            self.running[slot].append(token)
            if len(self.running[slot]) == LENGTH:
                self.done += 1
                print(f"request {self.done}: {self.running.pop(slot)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/server")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0, help="seconds between iterations")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model().eval()
    server = Server(options.out, active=8, file=f"{options.out}/trigger", signal=signal.SIGUSR2)
    server.attach(model)
    engine, iteration = Engine(model), 0
    print("ready", flush=True)
    while engine.done < options.requests:
        if iteration % 10 == 0:  # a request arrives
            engine.waiting.append(torch.randint(VOCABULARY, (5 + iteration % 7,)).tolist())
        if iteration == 44:
            server.start_profile()  # as a handler of POST /start_profile would, on its own thread
        engine.iterate()
        server.step()
        iteration += 1
        time.sleep(options.pause)
    server.detach()


if __name__ == "__main__":
    main()
