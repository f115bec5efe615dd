from pathlib import Path

import ncl_multi as ncl

pictures = sorted(Path("pictures").glob("*.png"))
captions = [picture.stem.replace("_", " ") for picture in pictures]
model = ncl.NonNegClip("efficientnet-lite0+minilm", dims=1024, k=16)  # or "hf:<any CLIP>"
model.fit(list(zip(pictures, captions, strict=True)), out="runs/pictures")

model = ncl.load("runs/pictures")
images, texts = model.encode(pictures), model.encode(captions)  # one space for both
print(ncl.explain(images[[0]], texts[[0]]))
