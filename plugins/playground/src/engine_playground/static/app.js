// Puts the parts together. Nothing here, or in what it imports, writes HTML: all text goes in as text.
import { Chat } from "./chat.js";
import { watchKey } from "./key.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { watchTheme } from "./theme.js";

const live = new Live();
watchKey(() => live.lookNow());
watchTheme(() => live.repaint());
new Chat(new Settings());
live.start();

const views = [...document.querySelectorAll("[data-show]")];
for (const button of views) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of views) other.setAttribute("aria-pressed", String(other === button));
    live.repaint();
  });
}
