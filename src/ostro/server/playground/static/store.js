// Stored state: settings in localStorage; the open conversation in sessionStorage, for this tab only, and so is the key
// unless the user wants it remembered. Both storages may be blocked.

const SETTINGS = "ostro.playground";
const KEY = "ostro.key";
const OPEN = "ostro.open";

let settings = read(() => JSON.parse(localStorage.getItem(SETTINGS))) ?? {};
let key = read(() => sessionStorage.getItem(KEY)) ?? read(() => localStorage.getItem(KEY)) ?? "";

export const setting = (name, otherwise) => settings[name] ?? otherwise;

export function remember(name, value) {
  settings = { ...settings, [name]: value };
  read(() => localStorage.setItem(SETTINGS, JSON.stringify(settings)));
}

export const currentKey = () => key;

export const isKeyRemembered = () => read(() => localStorage.getItem(KEY)) !== null;

/** Keeps the key for this tab or, `remembered`, in this browser. An empty one is forgotten everywhere. */
export function useKey(value, { remembered = false } = {}) {
  key = value;
  for (const [storage, isIts] of [[() => sessionStorage, !remembered], [() => localStorage, remembered]]) {
    read(() => (value && isIts ? storage().setItem(KEY, value) : storage().removeItem(KEY)));
  }
}

export const openConversation = () => read(() => sessionStorage.getItem(OPEN));

export const rememberOpen = (id) => read(() => sessionStorage.setItem(OPEN, id));

function read(access) {
  try {
    return access();
  } catch {
    return null;
  }
}
