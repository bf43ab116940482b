"""A GAN of two models and two optimizers, seven steps; the discriminator's optimizer steps first."""

import torch
from torch import nn

torch.manual_seed(0)


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


generator = Generator(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = Discriminator(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
for _ in range(7):
    fake = generator(torch.randn(8, 2))
    d_loss = discriminator(fake.detach()).mean() - discriminator(torch.randn(8, 4)).mean()
    d_optimizer.zero_grad()
    d_loss.backward()
    d_optimizer.step()
    g_loss = -discriminator(fake).mean()
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()
    print(d_loss.item(), g_loss.item())
