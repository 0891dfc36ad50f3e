// The map of the KV cache: one cell a page (or several), coloured by who holds it.
const HEIGHT = 240; // most pixels of it

export const CLASSES = ["free", "cached", "held by one", "by two", "by 3 or 4", "by 5 and more"];

export function colours() {
  const style = getComputedStyle(document.documentElement);
  // light-dark() stands in custom properties as it was written: a colour is what an element makes of it.
  const probe = document.createElement("i");
  document.body.append(probe);
  const found = CLASSES.map((_, index) => {
    probe.style.color = style.getPropertyValue(`--kv-${index}`);
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return found;
}

// cells: a digit for each.
export function paint(canvas, cells, palette) {
  const width = canvas.parentElement.clientWidth;
  if (!width || !cells.length) return;
  const step = Math.min(16, Math.max(2, Math.floor(Math.sqrt((width * HEIGHT) / cells.length))));
  const columns = Math.max(1, Math.floor(width / step));
  const height = Math.ceil(cells.length / columns) * step;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const size = step > 3 ? step - 1 : step;
  for (let i = 0; i < cells.length; i += 1) {
    pen.fillStyle = palette[cells.charCodeAt(i) - 48];
    pen.fillRect((i % columns) * step, Math.floor(i / columns) * step, size, size);
  }
}
