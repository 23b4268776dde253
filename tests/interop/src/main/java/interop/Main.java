package interop;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.common.conf.Constants.MessagingSystem;
import java.util.Arrays;
import java.util.concurrent.TimeUnit;
import org.apache.tephra.TxConstants;

/**
 * CDAP's and Tephra's own classes, spoken to from a command line. JSON lines on standard output, logs on standard
 * error, exit code 1 for any failure. {@code DIR} is always {@code messaging.local.data.dir}, the folder of the
 * three {@code system.tms.*} databases; it is opened in place, as CDAP would.
 */
public final class Main {
  private Main() {
  }

  public static void main(String[] args) {
    int status = 1;
    try {
      Output out = new Output();
      run(args[0], new Arguments(Arrays.asList(args).subList(1, args.length)), out);
      out.flush();
      status = 0;
    } catch (Exception e) {
      e.printStackTrace();
    }
    // CDAP's and Tephra's threads are not all daemons
    System.exit(status);
  }

  private static void run(String command, Arguments args, Output out) throws Exception {
    switch (command) {
      case "dump" -> Reading.dump(args.expect(1), out);
      case "raw" -> Reading.raw(args.expect(2), out);
      case "read-service" -> Reading.service(args.expect(1, "--snapshot", "--messages"), out);
      case "write" -> RandomStore.write(
          args.expect(2, "--now", "--rows", "--topics", "--payload-bytes", "--snapshots", "--kill"), out);
      case "fill" -> Pruning.fill(args.expect(1, "--now", "--rows", "--topics", "--payload-bytes", "--kill"), out);
      case "prune" -> Pruning.prune(args.expect(1, "--now"), out);
      case "snapshot" -> Snapshots.print(args.expect(1), out);
      case "write-snapshot" -> Snapshots.write(args.expect(1), out);
      default -> throw new IllegalArgumentException("unknown command " + command);
    }
  }

  /** CDAP's defaults on the given data directory. */
  static CConfiguration configuration(String dir) {
    CConfiguration conf = CConfiguration.create();
    conf.set(MessagingSystem.LOCAL_DATA_DIR, dir);
    // a publish is checked against the system clock, but our stores are written at any time we like
    conf.setLong(TxConstants.Manager.CFG_TX_MAX_LIFETIME, TimeUnit.DAYS.toSeconds(365L * 1000));
    return conf;
  }
}
