"""Optional: Data Parallelism, the 60-minute-blitz tutorial, in one process, with a short training after it."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

input_size, output_size = 5, 2
batch_size, data_size = 30, 300
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)
        self.label = (self.data[:, 0] * self.data[:, 1] > 0).long()

    def __getitem__(self, index):
        return self.data[index], self.label[index]

    def __len__(self):
        return self.len


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(input_size, 32), nn.Tanh(), nn.Linear(32, output_size))
        self.shown = False

    def forward(self, input):
        output = self.fc(input)
        if not self.shown:
            print("\tIn Model: input size", input.size(), "output size", output.size())
            self.shown = True
        return output


def main():
    torch.manual_seed(0)
    loader = DataLoader(RandomDataset(input_size, data_size), batch_size=batch_size, shuffle=True)
    model = Model(input_size, output_size)
    if torch.cuda.device_count() > 1:
        print("Let's use", torch.cuda.device_count(), "GPUs!")
    model = nn.DataParallel(model)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(12):
        running = 0.0
        for data, label in loader:
            input, label = data.to(device), label.to(device)
            output = model(input)
            loss = criterion(output, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        print(f"epoch {epoch} loss {running / len(loader):.4f}, outside: input size", input.size(), "output_size", output.size())
    torch.save(model.module.state_dict(), "/tmp/dp_blitz.pt")


if __name__ == "__main__":
    main()
