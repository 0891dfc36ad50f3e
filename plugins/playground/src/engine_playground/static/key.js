// The API key: it stays in this tab, and goes nowhere but into the Authorization header of requests to this server.
const NAME = "engine-playground-key";

export function authorization() {
  const key = document.getElementById("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export function watchKey(changed) {
  const field = document.getElementById("key");
  field.value = sessionStorage.getItem(NAME) ?? "";
  field.addEventListener("input", () => {
    if (field.value) sessionStorage.setItem(NAME, field.value);
    else sessionStorage.removeItem(NAME);
    field.removeAttribute("aria-invalid");
  });
  field.addEventListener("change", changed);
}

// The server has asked for a key, or for another one.
export function keyIsWanted() {
  document.getElementById("key").setAttribute("aria-invalid", "true");
}
