"""Find the slow steps of a training loop, and the phase that each lost its time in, without a trace."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import instrument

STEPS = 400


class Numbers(Dataset):
    """Samples that take long to load now and then, as from a busy file system."""

    def __len__(self) -> int:
        return 32 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 32 * 250:
            time.sleep(0.3)
        return torch.full((256,), index / len(self))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with instrument.annotate_step(), instrument.black_box(on_slow=print) as box:
        for step, batch in enumerate(DataLoader(Numbers(), batch_size=32)):
            with instrument.annotate("forward"):
                loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 49:
                with instrument.annotate("checkpoint"):
                    time.sleep(0.1)
            box.step()
    print(box.report())


if __name__ == "__main__":
    main()
